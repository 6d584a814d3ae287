"""What every test runs under: eight fake CPU devices, no silent rank or dtype promotion, nothing from a hub."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('WANDB_MODE', 'offline')
# Tests compile much and run little: XLA without its costly passes halves their time.
QUICK = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
os.environ['XLA_FLAGS'] = f'{QUICK} {os.environ.get("XLA_FLAGS", "")}'.strip()
# What pytest's processes and the runs they start have compiled once, none of them compiles again.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    cache = os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='mallm-tests-')
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
