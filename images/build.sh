#!/usr/bin/env bash
# Builds the images, all of them or those that are named: images/build.sh gate base extract train
#
#   ENGINE         the program that builds: buildah, podman or docker, whichever is found first;
#                  its own options may follow it
#   BUILD_FLAGS    more options of its build command
#   REGISTRY       what the names begin with (none); TAG (the project's version)
#   BASE_IMAGE_GATE, _BASE, _EXTRACT, _TRAIN   other bases than the Dockerfiles'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version="$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
revision="${EAGLE3_GIT_COMMIT:-$(git -c safe.directory='*' rev-parse HEAD 2>/dev/null || echo unknown)}"
# Every manifest records it: a commit that was not what ran must not be named as if it were.
if [ -n "$(git -c safe.directory='*' status --porcelain --untracked-files=normal 2>/dev/null)" ]; then
  revision+=-dirty
fi

die() {
  printf 'images: %s\n' "$1" >&2
  exit 78
}

engine() {
  local name
  if [ -n "${ENGINE:-}" ]; then echo "$ENGINE" && return; fi
  for name in buildah podman docker; do
    if command -v "$name" >/dev/null; then echo "$name" && return; fi
  done
  die "no buildah, podman or docker is here; install one, or name it by ENGINE."
}

# The image's own folder; the gate is a target of base's Dockerfile.
build() {
  local name="$1" folder="$1" base="BASE_IMAGE_${1^^}" words
  [ "$name" != gate ] || folder=base
  [ -f "images/$folder/Dockerfile" ] || die "there is no image '$name'; name gate, base, extract or train."
  read -ra words <<<"$engine build ${BUILD_FLAGS:-}"
  [ -z "${!base:-}" ] || words+=(--build-arg "BASE_IMAGE=${!base}")
  echo "images: building ${REGISTRY:+$REGISTRY/}eagle3-$name:${TAG:-$version}"
  "${words[@]}" --file "images/$folder/Dockerfile" --target "$name" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --tag "${REGISTRY:+$REGISTRY/}eagle3-$name:${TAG:-$version}" .
}

engine="$(engine)"
[ "$#" -gt 0 ] || set -- gate base extract train
for name in "$@"; do build "$name"; done
