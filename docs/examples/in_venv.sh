#!/bin/sh
# Run a command with StreamShard in ./.venv, which is made first:  sh docs/examples/in_venv.sh EXTRA COMMAND ..
# EXTRA names packages of pyproject.toml that the command needs. Run it from the root of this repository.
set -e
extra=$1
shift
python3 -m venv .venv
. .venv/bin/activate
pip install -c constraints.txt setuptools
pip install -c constraints.txt --no-build-isolation -e ".[$extra]"
exec "$@"
