"""Wrappers around Keras. Importing this package first checks that every wrapped name exists."""

from tfps.keras_hooks import keras_private as keras_private
