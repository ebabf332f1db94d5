"""What the experiments share: resumable tables, compilation, pictures."""
