"""How far training has come: times, timers and schedules. No torch."""
