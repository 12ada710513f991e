"""What a run will do, decided before it starts and carried as data. Needs no process group and no accelerator."""
