"""Programs that tests run in a process of their own (`tests.processes.run_program`)."""
