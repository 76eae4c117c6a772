# syntax=docker/dockerfile:1
# The console: one image for web, live, worker, beat, watcher, backup and restore. From the repository's root:
#   docker build -f deploy/docker/console.Dockerfile -t trainyard/console:0.1.0 .
ARG PYTHON=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /build
# Only what says which packages: this layer is made again only when they change.
COPY pyproject.toml constraints.txt README.md ./
RUN pip install -c constraints.txt '.[tracing]'

FROM dependencies AS built
WORKDIR /srv/console
COPY manage.py ./
COPY console console
COPY billing billing
COPY storage storage
COPY jobs jobs
COPY runtime runtime
COPY templates templates
COPY static static
COPY locale locale
COPY deploy/images deploy/images
# The key is for this command alone: it signs nothing that stays.
RUN SECRET_KEY=build TRAINYARD_VAR=/tmp/build TRAINYARD_STATIC_ROOT=/srv/static \
      python manage.py collectstatic --no-input --verbosity 0 \
 && python -m compileall -q . \
 && rm -rf /tmp/build

FROM ${PYTHON}
# Pango draws invoices as PDF; a font with Chinese characters, since customers may read Chinese.
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0 fonts-noto-cjk \
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
# A number, so that a cluster can see that it is not root. The root file system may be read-only; written are
# /var/lib/trainyard and /tmp (of a container's own) and /srv/trainyard (shared).
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["python", "/srv/console/manage.py"]
CMD ["serve", "web"]
