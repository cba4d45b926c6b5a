"""Pipeline parallelism: schedules as data, one executor, point-to-point messages."""
