"""The decoding step in C++ (`step.cpp`): built once for a machine (`build`), fed from Python (`mirror`)."""
