"""Shared small models and texts."""

from __future__ import annotations

import torch

torch.set_num_threads(2)
