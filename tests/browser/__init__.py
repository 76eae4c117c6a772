"""Tests in a browser: a package, so that its Chromium closes before tests of other folders run."""
