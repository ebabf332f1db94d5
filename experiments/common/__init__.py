"""What the experiments share: tables that go on where they were stopped, compiling, pictures."""
