"""`weft bench ab BASE HEAD`: is one commit slower than another? Both take turns on one machine, and two controls do."""
