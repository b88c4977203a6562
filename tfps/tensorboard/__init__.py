"""The "Parameter servers" tab of TensorBoard: needs the extra tfps[tensorboard]."""
