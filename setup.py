"""Lets tools that still call setup.py install the package; pyproject.toml declares everything."""

from setuptools import setup

setup()
