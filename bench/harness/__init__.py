"""What all benches share: ceilings of the machine, rounds in turn, random models."""
