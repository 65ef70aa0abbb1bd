"""What is written in C++: built once for a machine (`build`), called from `model` and `generation`."""
