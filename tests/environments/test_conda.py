"""Environment files of conda become requirements of the package index."""

from __future__ import annotations

from coderepairrl.environments.build import conda_requirements

FILE = """\
name: tests
channels:
  - conda-forge
dependencies:
  # required
  - python=3.10.4
  - numpy=1.21   # a comment
  - pandas >=1.1, <2
  - conda-forge::matplotlib-base==3.7.2
  - h5py=2=py37_0
  - fsspec!=2021.7.0
  - scipy 1.11.*
  # - pynio
  - iris
  - hdf5
  - pip=20.2
  - pip:
      - numbagg
      - extra[all] @ https://example.org/extra.whl
  - "zarr"
variables:
  - none
"""


def test_what_conda_asks_for_is_asked_of_the_index() -> None:
    python, found = conda_requirements(FILE)
    assert python == "3.10"
    assert found == [
        *("numpy==1.21.*", "pandas>=1.1,<2", "matplotlib==3.7.2", "h5py==2.*", "fsspec!=2021.7.0", "scipy==1.11.*"),
        *("scitools-iris", "numbagg", "extra[all] @ https://example.org/extra.whl", "zarr"),
    ]
    assert conda_requirements("dependencies:\n- numpy\n- pip:\n  - numbagg\n- scipy\n") == (
        "",
        ["numpy", "numbagg", "scipy"],
    )
    assert conda_requirements("# nothing\n") == ("", [])
