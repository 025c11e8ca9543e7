"""What plan and engine must agree on, in integers and names. It knows no torch."""
