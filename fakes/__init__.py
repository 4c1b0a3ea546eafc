"""What stands in for the outside: twins of the ports, each with the faults it may inject. Knows no world and no spec."""
