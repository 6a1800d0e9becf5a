#!/bin/sh
# Finds a Chromium for the tests of pages, or installs Debian's with apt-get if it runs as root, and prints its path.
# It never asks for a password: without a Chromium, the tests of pages are skipped. CHROMIUM=PATH names another one;
# CHROMIUM=none uses none.
found() {
    for name in ${CHROMIUM:-chromium chromium-browser google-chrome google-chrome-stable}; do
        command -v "$name" && return
    done
    [ -n "$CHROMIUM" ]
}
found && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "== Debian's Chromium for the tests of pages, 110 MB to download, once =="
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -qq --no-install-recommends -o DPkg::Lock::Timeout=120 \
        chromium fonts-dejavu-core >/dev/null
    found && exit 0
fi
echo "Chromium not found: the tests of pages are skipped"
