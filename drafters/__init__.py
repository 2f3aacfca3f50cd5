"""Drafters: the networks, their configs, and the target they draft for.

A method is one line of DRAFTERS. To add one: a file of its name in every room, a line here, a YAML.
"""

from drafters.checkpoint import load_drafter, save_drafter
from drafters.medusa import MedusaDrafter

DRAFTERS = {
    "medusa": MedusaDrafter,
}

__all__ = ["DRAFTERS", "load_drafter", "save_drafter"]
