# fog for CPUs, built from the source tree: docker build -t fog . && docker run --rm --shm-size=1g fog
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/fog
ENV PATH=/opt/fog/bin:$PATH
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$TORCH" \
    setuptools setuptools-scm ninja pybind11 "mpich>=5" scikit-learn matplotlib numpy networkx
COPY . /src
RUN pip install --no-cache-dir --no-build-isolation --no-deps /src

FROM python:3.12-slim
COPY --from=build /opt/fog /opt/fog
COPY examples /work/examples
RUN useradd --create-home fog && chown -R fog /work
USER fog
WORKDIR /work
ENV PATH=/opt/fog/bin:$PATH OMP_NUM_THREADS=1
# make demo, without make.
CMD ["torchrun", "--standalone", "--nproc_per_node=4", "examples/train_digits.py"]
