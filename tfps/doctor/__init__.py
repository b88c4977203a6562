"""`tfps_doctor`: whether a job would run here, and what to do if not."""
