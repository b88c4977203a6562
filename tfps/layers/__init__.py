"""Layers whose embeddings live on parameter servers: tables of rows that no worker could hold."""

from __future__ import annotations

from tfps.layers.distributed import DistributedEmbedding
from tfps.layers.distributed_configs import FeatureConfig, TableConfig
from tfps.layers.embedding import Embedding

__all__ = ["DistributedEmbedding", "Embedding", "FeatureConfig", "TableConfig"]
