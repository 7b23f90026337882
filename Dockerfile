# GPU image. apex is NVIDIA's, built from source; without it everything works, with torch's fused optimizer.
#   docker build -t kerple-neox .
#   docker run --gpus all --shm-size=8g -v "$PWD/data:/workspace/data" -v "$PWD/runs:/workspace/runs" -it kerple-neox
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PATH=/opt/venv/bin:$PATH
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev python3-venv git build-essential pdsh openssh-client \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv

ARG TORCH=torch==2.13.0
RUN pip install --upgrade pip "setuptools>=77" wheel packaging ninja && pip install "${TORCH}"

# Set APEX=0 to leave it out (the build takes a while). A named release, so that an image can be built again.
ARG APEX=1
ARG APEX_VERSION=25.09
ARG MAX_JOBS=8
RUN if [ "$APEX" = 1 ]; then \
      git clone --depth 1 --branch "$APEX_VERSION" https://github.com/NVIDIA/apex /tmp/apex \
      && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS=$MAX_JOBS pip install -v --no-build-isolation /tmp/apex \
      && rm -rf /tmp/apex; \
    fi

WORKDIR /workspace
COPY requirements requirements
RUN DS_BUILD_OPS=0 pip install -r requirements/gpu.txt
COPY . .
CMD ["bash"]
