# syntax=docker/dockerfile:1
# One image for web, worker, beat, watcher, backup and restore. Build it from the repository's root:
#   docker build -f deploy/docker/console.Dockerfile -t trainyard/console:0.2.0 .
ARG PYTHON=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /build
# Requirements only, so that this layer is rebuilt only when they change.
COPY requirements/production.txt ./
RUN pip install --require-hashes -r production.txt

FROM dependencies AS built
WORKDIR /srv/console
COPY manage.py ./
COPY console console
COPY billing billing
COPY storage storage
COPY jobs jobs
COPY runtime runtime
COPY templates templates
COPY docs docs
COPY static static
COPY locale locale
COPY deploy/images deploy/images
COPY examples examples
# A key for this command only; nothing keeps its signatures.
RUN SECRET_KEY=build TRAINYARD_VAR=/tmp/build TRAINYARD_STATIC_ROOT=/srv/static \
      python manage.py collectstatic --no-input --verbosity 0 \
 && python -m compileall -q . \
 && rm -rf /tmp/build

FROM ${PYTHON}
# Pango and a font with Chinese characters, for invoices as PDF. Git, to start workspaces with repositories.
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0 fonts-noto-cjk git \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trainyard \
 && install -d -o trainyard -g trainyard -m 0700 /var/lib/trainyard /srv/trainyard
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=built /srv/static /srv/static
COPY --from=built /srv/console /srv/console
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    DJANGO_SETTINGS_MODULE=console.settings \
    TRAINYARD_VAR=/var/lib/trainyard \
    TRAINYARD_STATIC_ROOT=/srv/static \
    TRAINYARD_STORAGE_ROOT=/srv/trainyard/storage \
    TRAINYARD_RUNS_ROOT=/srv/trainyard/runs \
    WEB_BIND=0.0.0.0:8000
WORKDIR /srv/console
# A numeric user, so that a cluster can verify that it is not root. Only /var/lib/trainyard and /tmp (private) and
# /srv/trainyard (shared) are written; the root file system may be read-only.
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["python", "/srv/console/manage.py"]
CMD ["serve", "web"]
