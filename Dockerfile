# GPU image. It has not been built or run yet: tests only check that the files named here exist.
# NVIDIA apex is built from source. It is optional: without it, PyTorch's fused optimizer is used.
#   docker build --build-arg COMMIT=$(git describe --always --dirty --abbrev=40 --exclude='*') -t kerple-neox .
#   docker run --gpus all --shm-size=8g -v "$PWD/data:/workspace/data" -v "$PWD/runs:/workspace/runs" -it kerple-neox
# The CUDA version must be that of the PyTorch build: apex checks this.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

ARG DEBIAN_FRONTEND=noninteractive
ENV PIP_NO_CACHE_DIR=1 PATH=/opt/venv/bin:$PATH
# Ubuntu removes old versions of packages, so they cannot be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      build-essential ca-certificates git openssh-client pdsh python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv

ARG TORCH=torch==2.13.0
# hadolint ignore=DL3013
RUN pip install --upgrade pip "setuptools>=77" wheel packaging ninja && pip install "${TORCH}"

# APEX=0 skips apex, which takes long to build. Its release is pinned so that builds are reproducible. No GPU is visible
# during the build, so the architectures are listed: A100, A10 and RTX 30, H100, B200, RTX 50.
ARG APEX=1
ARG APEX_VERSION=25.09
ARG MAX_JOBS=8
ARG TORCH_CUDA_ARCH_LIST="8.0;8.6;9.0;10.0;12.0"
RUN if [ "$APEX" = 1 ]; then \
      git clone --depth 1 --branch "$APEX_VERSION" https://github.com/NVIDIA/apex /tmp/apex \
      && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation /tmp/apex \
      && rm -rf /tmp/apex; \
    fi

WORKDIR /workspace
COPY requirements requirements
RUN cd requirements && DS_BUILD_OPS=0 pip install -c lock.txt -r core.txt -r train.txt -r data.txt -r report.txt \
      -r eval.txt -r tracking.txt -r gpu.txt
COPY . .
# .git is not copied. Results name this commit.
ARG COMMIT=
ENV KERPLE_COMMIT=${COMMIT}
CMD ["bash"]
