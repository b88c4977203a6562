"""Packaging of tfps; settings of the tools are in pyproject.toml."""

import re
from pathlib import Path
from runpy import run_path

from setuptools import Extension, find_packages, setup

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
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"]
# With some fifty others: not for every .venv. twine renders Markdown with readme-renderer[md] only.
RELEASE = ["ipykernel>=6.29", "nbclient>=0.10", "readme-renderer[md]>=44", "twine>=6"]
# Heavy: for tests/models only, which is skipped without.
MODELS = ["keras-hub>=0.20", "keras-rs>=0.3"]
MPI = ["mpi4py>=4"]
RAY = ["ray[train]>=2.60"]
TEST = [
    *EXAMPLES,
    *METRICS,
    *CONSOLE,
    *TENSORBOARD,
    "hypothesis>=6.100",
    "kubernetes-validate>=1.37",
    "psutil>=5.9",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.5",
    "pyyaml>=6.0.1",
    "selenium>=4.15",
]


def index_page() -> str:
    """The README as a package index shows it, where relative links lead nowhere: their words stay, pictures go.

    The repository has no public address yet; once it has one, make these links absolute instead.
    """
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    relative = r"\((?!https?://|#)[^()]+\)"
    without_pictures = re.sub(rf"!\[[^\]]*\]{relative}\n*", "", readme)
    plain = re.sub(rf"\[([^\]]+)\]{relative}", r"\1", without_pictures).replace("'.[", "'tfps[")
    return f"{plain}\nThe files that this page names are in the source distribution.\n"


setup(
    name="tfps",
    version=run_path(str(HERE / "tfps" / "__init__.py"))["__version__"],
    description="A tf.distribute strategy for Keras 3 that trains through gRPC parameter servers and hides the network",
    long_description=index_page(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["tfps", "tfps.*"]),
    package_data={
        "tfps": ["py.typed"],
        "tfps.protos": ["*.pyi"],
        "tfps.launch": ["templates/*.yaml"],
        "tfps.tensorboard": ["static/*"],
        "tfps.wire": ["*.pyi"],
    },
    # Without a C compiler tfps does the same in Python.
    ext_modules=[
        Extension("tfps.wire._native", ["tfps/wire/_native.c"], define_macros=[("_GNU_SOURCE", "1")], optional=True)
    ],
    install_requires=["grpcio>=1.68", "protobuf>=3.20.3", "numpy>=1.26", "packaging>=22"],
    extras_require={
        "tensorflow": [f"tensorflow{TENSORFLOW}", KERAS],
        "cpu": [f"tensorflow-cpu{TENSORFLOW}; {HAS_CPU_WHEEL}", f"tensorflow{TENSORFLOW}; {NO_CPU_WHEEL}", KERAS],
        "metrics": METRICS,
        "examples": EXAMPLES,
        "console": CONSOLE,
        "tensorboard": TENSORBOARD,
        "docs": DOCS,
        "release": RELEASE,
        "models": MODELS,
        "mpi": MPI,
        "ray": RAY,
        "test": TEST,
        "dev": [
            *TEST,
            "build>=1.2",
            "import-linter>=2.5",
            "matplotlib>=3.10",
            "mypy>=1.13",
            "ruff>=0.9",
            "types-protobuf>=5",
            "types-psutil>=5.9",
            "types-pyyaml>=6",
        ],
    },
    entry_points={
        "console_scripts": [
            "tfps_pserver=tfps.pserver.cli:main",
            "tfps_launch=tfps.launch.cli:main",
            "tfps_trace=tfps.trace.cli:main",
            "tfps_doctor=tfps.doctor.cli:main",
        ],
        "tensorboard_plugins": ["tfps=tfps.tensorboard:ParameterServersPlugin"],
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
