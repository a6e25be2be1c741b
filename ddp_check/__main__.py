"""python ddp_check my_script.py --its --flags"""

import os
import sys

if not __package__:  # the folder is run, as a script is: it becomes a package, behind all others
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(sys.path[0])  # where the script's processes find it, too

if __name__ == "__main__":
    if "DDP_CHECK" in os.environ:
        from ddp_check.child import child

        child()
    else:
        from ddp_check.command import main

        main()
