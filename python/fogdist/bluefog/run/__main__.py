"""`bfrun`: ``python -m fogdist.bluefog.run -np 4 python script.py --its --arguments``."""

from fogdist.bluefog.run import main

main()
