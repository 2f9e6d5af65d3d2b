from belljar.cli import main

main()
