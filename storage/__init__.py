"""Images, datasets, models and workspaces: the files that runs read and write. It never imports `billing`."""
