"""Architectures, each written once on ops. `build` makes a checkpoint a Model."""

from octavo.models.interface import Model as Model
from octavo.models.registry import build as build
