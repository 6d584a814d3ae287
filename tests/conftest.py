"""What every test runs under: eight fake CPU devices, no silent rank or dtype promotion, nothing from a hub."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('WANDB_MODE', 'offline')
# Tests compile much and run little: XLA without its costly passes halves their time.
QUICK = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
os.environ['XLA_FLAGS'] = f'{QUICK} {os.environ.get("XLA_FLAGS", "")}'.strip()

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
