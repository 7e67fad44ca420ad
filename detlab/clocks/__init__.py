"""Do clocks change results? Timing is moved for real, and bits held against it; and ways in which timing does reach them."""

from detlab.clocks.experiment import ClockExperiment, TimedRun, clock_experiment
from detlab.clocks.races import Mechanism, Mechanisms, mechanisms

__all__ = ["ClockExperiment", "Mechanism", "Mechanisms", "TimedRun", "clock_experiment", "mechanisms"]
