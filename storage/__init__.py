"""Images, datasets and workspaces: the files that runs read and write. Never imports `billing`."""
