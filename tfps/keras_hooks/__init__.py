"""What is wrapped of Keras. First of all it is checked that all of it is there."""

from tfps.keras_hooks import keras_private as keras_private
