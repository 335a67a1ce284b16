# Needs python3 (3.10 or newer, with venv), bash, make and git. The environments are made by
# .ci/env, outside the checkout. ARGS is passed on: make unit ARGS="-k store -x"
.PHONY: help demo test lint format unit host bench-quick clean clean-envs
.NOTPARALLEL:
.DEFAULT_GOAL := help

ARGS ?=
ENV = bash .ci/env

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: ## a creator's session on the embedded backbone; no ComfyUI, GPU or download of weights
	@env="$$($(ENV) demo)" && exec "$$env/bin/python" -m carnator demo $(ARGS)

test: lint unit host ## lint, unit tests, and host tests where a ComfyUI checkout is found

lint: ## formatting, lint rules, types
	@env="$$($(ENV) dev)" && set -x && \
	"$$env/bin/ruff" format --check . && \
	"$$env/bin/ruff" check . && \
	bash .ci/types "$$env/bin/mypy"

format: ## apply formatting and the safe fixes
	@env="$$($(ENV) dev)" && "$$env/bin/ruff" check --fix-only . && "$$env/bin/ruff" format .

unit: ## unit tests; no ComfyUI
	@env="$$($(ENV) dev)" && exec "$$env/bin/python" -m pytest tests/unit $(ARGS)

host: ## tests in each ComfyUI checkout found ($COMFYUI_PATH, ~/comfy/ComfyUI*, above the pack)
	@exec bash .ci/host-tests $(ARGS)

bench-quick: ## deviation against evaluations, short form (ARGS="--plot PATH --json PATH")
	@env="$$($(ENV) dev)" && exec "$$env/bin/python" -m benchmarks.fidelity --quick $(ARGS)

clean: ## remove what tools left in the checkout; keeps the environments
	@rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

clean-envs: ## remove the environments that .ci/env made
	@bash .ci/env --remove
