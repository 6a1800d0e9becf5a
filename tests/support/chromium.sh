#!/bin/sh
# Sees to a Chromium for the tests that look at pages, and says which. What the machine has is taken; root gets Debian's
# where there is apt-get. Nobody is asked for a password: without a Chromium those tests are skipped. CHROMIUM=PATH
# names another one, CHROMIUM=none has none.
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
echo "no Chromium here: the tests of pages are skipped"
