"""What every test runs under: eight fake CPU devices, no silent rank or dtype promotion, nothing from a hub."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('WANDB_MODE', 'offline')

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
