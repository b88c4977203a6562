"""Wrappers around Keras. Importing it first checks that every name exists."""

from tfps.keras_hooks import keras_private as keras_private
