"""Programs that tests run in a separate process (`tests.kit.programs.program`)."""
