# syntax=docker/dockerfile:1
# A training image from the same recipe as the local backend's (deploy/images/IMAGE.txt). Build it from the root:
#   docker build -f deploy/docker/training.Dockerfile --build-arg IMAGE=pytorch -t trainyard/pytorch:0.2.0 .
# Or all of them: docker buildx bake -f deploy/docker/docker-bake.json
ARG PYTHON=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON} AS built
ARG IMAGE
# cuda for GPU nodes, cpu for others.
ARG FLAVOUR=cpu
# A compiler: Horovod is published as source only.
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY requirements/uv.txt ./
RUN python -m venv /opt/builder && /opt/builder/bin/pip install --no-cache-dir --require-hashes -r uv.txt
COPY runtime runtime
COPY deploy/images deploy/images
COPY deploy/docker/install_image.py ./
RUN PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 PYTHONPATH=/build /opt/builder/bin/python install_image.py "${IMAGE:?say --build-arg IMAGE=pytorch}" /opt/image "${FLAVOUR}"

FROM ${PYTHON}
ARG IMAGE
ARG FLAVOUR=cpu
LABEL dev.trainyard.image=${IMAGE} dev.trainyard.flavour=${FLAVOUR}
COPY --from=built /opt/image /opt/image
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trainyard
ENV PATH=/opt/image/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
# The run provides the launcher, so there is no entry point.
CMD ["python3"]
