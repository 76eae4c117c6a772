# syntax=docker/dockerfile:1
# An image that runs train in, from the same recipe as the local backend's (deploy/images/IMAGE.txt). From the root:
#   docker build -f deploy/docker/training.Dockerfile --build-arg IMAGE=pytorch -t trainyard/pytorch:0.1.0 .
# Or all of them: docker buildx bake -f deploy/docker/docker-bake.json
ARG PYTHON=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON} AS built
ARG IMAGE
# A compiler for Horovod, which is published as source only.
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /build
RUN python -m venv /opt/builder
COPY runtime runtime
COPY deploy/images deploy/images
COPY deploy/docker/install_image.py ./
RUN PIP_NO_CACHE_DIR=1 PYTHONPATH=/build /opt/builder/bin/python install_image.py "${IMAGE:?say --build-arg IMAGE=pytorch}" /opt/image

FROM ${PYTHON}
ARG IMAGE
LABEL dev.trainyard.image=${IMAGE}
COPY --from=built /opt/image /opt/image
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trainyard
ENV PATH=/opt/image/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
# The launcher comes with the run; there is nothing to start by itself.
CMD ["python3"]
