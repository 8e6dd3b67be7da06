from revela.cli import main

main()
