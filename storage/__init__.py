"""What a run reads and writes: images, datasets, workspaces. Never meets `billing`."""
