"""What large batches, LARS, grouped convolutions, rounding and schedules do: experiments of many small runs."""
