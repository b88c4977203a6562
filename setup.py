"""Packaging of tfps; settings of the tools are in pyproject.toml."""

from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

# A host that only runs pservers needs no TensorFlow, hence no requirement but an extra.
TENSORFLOW = ">=2.18,<2.22"
KERAS = "keras>=3.8"  # older ones do not divide the loss by the number of replicas
# The CPU-only wheel is a third of the size; it exists for these platforms only.
HAS_CPU_WHEEL = (
    '(sys_platform == "linux" and platform_machine == "x86_64") or '
    '(sys_platform == "win32" and platform_machine == "AMD64")'
)
NO_CPU_WHEEL = (
    '(sys_platform != "linux" or platform_machine != "x86_64") and '
    '(sys_platform != "win32" or platform_machine != "AMD64")'
)
EXAMPLES = ["scikit-learn>=1.4"]
METRICS = ["prometheus-client>=0.20"]
CONSOLE = ["rich>=13"]
TENSORBOARD = ["tensorboard>=2.18"]
RAY = ["ray[train]>=2.60"]
TEST = [
    *EXAMPLES,
    *METRICS,
    *CONSOLE,
    *TENSORBOARD,
    "hypothesis>=6.100",
    "psutil>=5.9",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.5",
    "selenium>=4.15",
]

setup(
    name="tfps",
    version=run_path(str(HERE / "tfps" / "version.py"))["__version__"],
    description="A tf.distribute strategy for Keras 3 that trains through gRPC parameter servers and hides the network",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["tfps", "tfps.*"]),
    package_data={"tfps": ["py.typed"], "tfps.protos": ["*.pyi"], "tfps.tensorboard": ["static/*"]},
    install_requires=["grpcio>=1.60", "protobuf>=3.20.3", "numpy>=1.26"],
    extras_require={
        "tensorflow": [f"tensorflow{TENSORFLOW}", KERAS],
        "cpu": [f"tensorflow-cpu{TENSORFLOW}; {HAS_CPU_WHEEL}", f"tensorflow{TENSORFLOW}; {NO_CPU_WHEEL}", KERAS],
        "metrics": METRICS,
        "examples": EXAMPLES,
        "console": CONSOLE,
        "tensorboard": TENSORBOARD,
        "ray": RAY,
        "test": TEST,
        "dev": [
            *TEST,
            "matplotlib>=3.10",
            "mypy>=1.13",
            "ruff>=0.9",
            "types-protobuf>=5",
            "types-psutil>=5.9",
        ],
    },
    entry_points={
        "console_scripts": [
            "tfps_pserver=tfps.pserver.cli:main",
            "tfps_launch=tfps.launch.cli:main",
            "tfps_trace=tfps.trace.cli:main",
        ],
        "tensorboard_plugins": ["tfps=tfps.tensorboard.plugin:ParameterServersPlugin"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
