"""Programs that tests run in a separate process (`tests.processes.program`)."""
