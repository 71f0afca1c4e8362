"""Architectures, each written once on ops; `build` makes a checkpoint a Model. Knows no scheduling and no kernels."""

from octavo.models.interface import Model as Model
from octavo.models.registry import build as build
