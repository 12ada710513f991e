"""The order of samples: permutations, step schedules and samplers. All are pure functions of position and seed."""
